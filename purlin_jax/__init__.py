"""Fast collectives for JAX inside one machine. No device is touched at import."""

from importlib.metadata import version as _version

from purlin_jax import domain as _domain
from purlin_jax.backend import FallbackError, backend
from purlin_jax.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from purlin_jax.domain import (
    export_checks,
    last_report,
    native_calls,
    native_regimes,
    set_timeout,
)
from purlin_jax.drop_in import pmax, pmean, pmin, psum, psum_scatter
from purlin_jax.explain import Collective, Explanation, explain
from purlin_jax.head_exchange import gather_heads, scatter_heads
from purlin_jax.joint import Joint
from purlin_jax.policy import Policy, policy
from purlin_jax.ulysses import ulysses_attention
from purlin_jax.varlen import (
    all_gather_v,
    all_to_all_v,
    ppermute,
    ragged_all_to_all,
    reduce_scatter_v,
)

__version__ = _version("purlin-jax")
__all__ = [
    "Collective",
    "Explanation",
    "FallbackError",
    "Joint",
    "Policy",
    "all_gather",
    "all_gather_v",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "backend",
    "explain",
    "export_checks",
    "gather_heads",
    "last_report",
    "native_calls",
    "native_regimes",
    "pmax",
    "pmean",
    "pmin",
    "policy",
    "ppermute",
    "psum",
    "psum_scatter",
    "ragged_all_to_all",
    "reduce_scatter",
    "reduce_scatter_v",
    "scatter_heads",
    "set_timeout",
    "ulysses_attention",
]

_domain.check_ffi_api()
_domain.register_cpu()
