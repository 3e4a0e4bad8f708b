"""Front processes: they hold the connections of clients, around the one process that emulates.

A front reads calls and writes answers; it decides nothing. What a call is answered with is the
business of the same applications as in a server of one process (`link`), which is told of whole
calls and hands back heads, pieces, and, of plain streams, how many tokens have come (`frames`).
"""
