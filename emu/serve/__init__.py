"""Live mode: the emulated cluster on the wall clock, behind an OpenAI-compatible server.

world        LiveCluster     the same actors; requests come from clients, tokens go to them
recording    LiveRecorder    a run's files, and the traffic as a workload that can be replayed
protocol     bodies, errors  what clients send, and what they get when it is wrong
tokens       tokenizers      counts, and filler text that counts as stated
completions  the two completion endpoints, streaming and not
failures     failure schedules: what a flaky server does, on purpose and repeatably
metrics      Prometheus text under vLLM's names, and the emulator's own
control      /emu/...: state, events, faults, scaling, commands; the live page
app, server  assembly, and the rim (sockets, signals, files)
client, observe  a load driver that measures a real server with a workload
"""
