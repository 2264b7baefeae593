"""The operators' port of coordinators in tests, which is made with its first request.

To make its eighty routes takes the framework 90 ms of CPU, which is most of a coordinator's start, and few tests ask
there.
"""

import functools

from coordinator import server


def made_when_asked(make):
    """What makes the application with its first request, where `make` does at once."""

    def later(service):
        made = functools.cache(lambda: make(service))

        async def application(scope, receive, send):
            if scope["type"] != "lifespan":  # it begins and ends nothing with the server
                await made()(scope, receive, send)

        return application

    return later


def operators_when_asked():
    """From now on every coordinator of this process makes its operators' port so."""
    server.admin_app = made_when_asked(server.admin_app)
