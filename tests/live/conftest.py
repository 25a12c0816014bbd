from stand_fixtures import stand_environment, start_server

__all__ = ["stand_environment", "start_server"]
