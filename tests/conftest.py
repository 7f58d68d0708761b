"""Before any test: settings of Hypothesis, and of the BLAS under the oracle."""

import os

from hypothesis import HealthCheck, settings

# The oracle's products are small: threads would spend their time waiting for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

settings.register_profile(
    "default",
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
