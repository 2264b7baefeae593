"""Shorter ticks for uvicorn, which sleeps for a tenth of a second four times while a coordinator stops."""

import asyncio
from types import SimpleNamespace

import uvicorn.server

TENTH = 0.1


async def sleep(seconds):
    await asyncio.sleep(seconds * TENTH)


def shorten_ticks():
    """From now on every server of this process takes a tenth of the time to notice that it should stop."""
    uvicorn.server.asyncio = SimpleNamespace(**vars(asyncio) | {"sleep": sleep})
