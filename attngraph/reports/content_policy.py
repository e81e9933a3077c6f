"""What a browser may do with a page of ours."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256


def content_policy(*styles: str) -> str:
    """A Content-Security-Policy that allows these style sheets, by their hashes, and images that
    lie in the page; no script, no request and no form, whatever a name in the page smuggles in.
    """
    digests = (b64encode(sha256(style.encode()).digest()).decode() for style in styles)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; img-src data:; style-src {allowed}; base-uri 'none'; "
        "form-action 'none'"
    )
