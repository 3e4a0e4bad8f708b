"""Live mode: the emulated cluster on the wall clock, behind an OpenAI-compatible server.

world        LiveCluster     holds a world; requests come from clients, tokens go to them
recording    Tape            the traffic as a workload that can be replayed
protocol     bodies, errors  what clients send, what they get when it is wrong or made to fail
script       tokenizers      counts, and filler text that counts as stated
completions  from a call to requests, from tokens to an answer; chats are other forms of it
metrics      Prometheus text under vLLM's names, and the emulator's own
control      /emu/...: state, events, faults, scaling, commands; the live page
fleet, endpoint  each replica on a port of its own
app, server  assembly, and the rim (sockets, signals, files)
observe      a load driver that measures a real server with a workload
"""
