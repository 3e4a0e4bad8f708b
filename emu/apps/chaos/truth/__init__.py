"""A second, slow model of what a run should have been: reads the history, shares no engine code.

Owns: the judgment of costs, choices, faults and figures from the records of `events.jsonl`, the
configuration and the placement of replicas. Each module restates one part of the rules in the
plainest way that there is; `judges` calls them all. None imports a scheduler, a latency backend,
the network, a planner or the report: a rule that the engine has wrong is not wrong here in the same
way.

Does not do: run anything. What a restated rule does not cover (another backend, a policy of a
user's own) is passed over, never guessed.
"""
