"""Admission by the objective: a request that would miss its first token is refused at once.

    [router]
    admission = "./slo_admission.py:SloAdmission"
    [slo]
    ttft_ms = 2000

The wait is predicted as the prompt tokens that wait on the emptiest replica, over the rate at which
prompts were read lately. The most urgent priority is admitted as long as the prediction meets the
objective; each lower one only up to `SHARE` of what the one above it may use, so that a burst of
unimportant requests never takes the room of important ones.
"""

from emu.policy import Context, RequestView

SHARE = 0.5
WINDOW_S = 10.0


class SloAdmission:
    """Admits what will meet the objective."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._objective_ms = context.objectives_ms[0] or 2000.0
        self._read_tokens = 0
        self._rate = 0.0

    def admit(self, request: RequestView) -> str:
        """Empty, or why not."""
        serving = [r for r in self._context.replicas if r.state in ("colocated", "prefill")]
        if not serving:
            return ""  # it is held until there is one
        emptiest = min(serving, key=lambda replica: (replica.waiting_tokens, replica.replica_id))
        tokens = emptiest.waiting_tokens + request.prompt_tokens
        prompt_ms = self._context.iteration_ms(
            prompt_tokens=min(tokens, 2048), decodes=emptiest.running
        )
        predicted_ms = prompt_ms * max(1.0, tokens / 2048)
        if predicted_ms <= self._objective_ms * SHARE ** max(0, request.priority):
            return ""
        return f"predicted TTFT over the objective of priority {request.priority}"
