"""A plan that devices refuse with the policy that they have by default, said before one of them hears of it."""

from __future__ import annotations

from device_runtime.permission.policy import Policy
from fedcore.params import FLOAT_BYTES
from fedcore.plan import Plan


def refused_by_default(plan: Plan) -> str:
    """Why such devices refuse a plan: they could not keep it, and would fetch it again in every round. Else empty."""
    most, checkpoint = Policy().cache_bytes, FLOAT_BYTES * sum(vector.size for vector in plan.broadcast)
    kept = checkpoint + max(sum(ref.size for ref in plan.kept_refs(form)) for form in plan.graphs)
    if kept <= most:
        return ""
    return (
        f"Devices keep {kept / 1e6:,.0f} MB of this plan between rounds. Those whose policy has cache_bytes of "
        f"{most / 1e6:,.0f} MB, as by default, refuse it: take weights in fewer bits, or raise cache_bytes."
    )
