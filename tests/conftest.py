"""Eight virtual CPU devices and strict mode, set before any backend starts."""

import os

# A silent fall to jax.lax would pass every parity test, so in here it is an error.
os.environ["PURLIN_FALLBACK"] = "error"
# What the caller's shell prefers must not choose what is tested.
os.environ.pop("PURLIN_BACKEND", None)
os.environ.pop("PURLIN_POLICY", None)

import jax

jax.config.update("jax_num_cpu_devices", 8)
