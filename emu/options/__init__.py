"""What a user may say to a command or to a function of emu, declared once.

declare.py     an option: its type, its bounds, its help; a struct of options
shared.py      options that several commands have
"""
