"""Is it still aligned afterwards?"""

from subspan.safety.buffer_reinforce.merge import qr_merge

__all__ = [
    "qr_merge",
]
