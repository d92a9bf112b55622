"""How tests run here: under nobody's own settings, with the same examples every time, and with no verdict that depends
on how fast the machine is."""

import os

from hypothesis import HealthCheck, Phase, settings

for name in [name for name in os.environ if name.upper().startswith("KVFERRY_")]:
    del os.environ[name]

settings.register_profile(
    "kvferry", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
# For whoever wants to know only whether there is a failing example.
settings.register_profile("unshrunk", settings.get_profile("kvferry"), phases=(Phase.explicit, Phase.generate))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kvferry"))
