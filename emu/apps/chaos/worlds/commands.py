"""Draws of `[[commands]]`: replicas that leave, come back or change their part by hand."""

from __future__ import annotations

from emu.apps.chaos.worlds.drawing import TIMES_S, Rng, Tables, chance, pick


def colocated_commands(rng: Rng, tables: Tables) -> list[Tables]:
    """All but the first leave and come back by hand, or come for the first time."""
    commands: list[Tables] = []
    serving, *idle = (group["count"] for group in tables["replicas"])
    for replica in range(1, serving + sum(idle)):
        at_s = float(pick(rng, TIMES_S))
        if replica < serving:
            commands.append({"at_s": at_s, "replica": replica, "command": "deactivate"})
            at_s += float(pick(rng, TIMES_S))
        if chance(rng, 0.6):
            commands.append({"at_s": at_s, "replica": replica, "command": "to_colocated"})
    return commands


def role_commands(rng: Rng, tables: Tables) -> list[Tables]:
    """Roles change by hand, but one replica of each kind stays as it is."""
    prefill, decode, *idle = (group["count"] for group in tables["replicas"])
    commands: list[Tables] = []
    for replica in range(1, prefill):
        at_s = float(pick(rng, TIMES_S))
        word = pick(rng, ("to_decode", "deactivate", "to_old_prefill"))
        commands.append({"at_s": at_s, "replica": replica, "command": word})
        if word == "deactivate" and chance(rng, 0.6):
            later = at_s + float(pick(rng, TIMES_S))
            commands.append({"at_s": later, "replica": replica, "command": "to_prefill"})
    for replica in range(prefill + 1, prefill + decode):
        at_s = float(pick(rng, TIMES_S))
        commands.append({"at_s": at_s, "replica": replica, "command": "deactivate"})
        if chance(rng, 0.6):
            later = at_s + float(pick(rng, TIMES_S))
            commands.append({"at_s": later, "replica": replica, "command": "to_decode"})
    for replica in range(prefill + decode, prefill + decode + sum(idle)):
        word = pick(rng, ("to_prefill", "to_decode", "to_new_prefill"))
        at_s = float(pick(rng, TIMES_S))
        commands.append({"at_s": at_s, "replica": replica, "command": word})
    return commands
