from tests.simulator.conftest import bundle, federate, servers

__all__ = ["bundle", "federate", "servers"]
