"""For all tiers: no event loop but those of the tests.

Asked for "the current event loop" before the first test, Python up to 3.13 makes one that nobody closes; its warning
would then fail whichever test the garbage collector runs in. After this call it is not made (pytest-asyncio asks).
"""

import asyncio

asyncio.set_event_loop(None)
