"""How hypothesis runs here: the same examples every time, and no verdict that depends on how fast the machine is."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvferry", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvferry")
