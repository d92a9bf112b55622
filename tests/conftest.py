"""How hypothesis runs here: the same examples every time, and no verdict that depends on how fast the machine is."""

import os

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "kvferry", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
# For whoever wants to know only whether there is a failing example.
settings.register_profile("unshrunk", settings.get_profile("kvferry"), phases=(Phase.explicit, Phase.generate))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kvferry"))
