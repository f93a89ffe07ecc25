"""Whether an address of packages can be used. Also runs on a node, alone: ``python3 - URL STRICT SECONDS``.

It needs nothing but the standard library, and no newer Python than Ubuntu 20.04's.
"""

import sys
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit


def probe(url: str, *, strict: bool, limit_s: float) -> str:
    """Why an address can't be used; empty where it can.

    ``strict``: it is a page itself, so that a refusal of it counts.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        return "" if Path(parts.path).exists() else "is not there"
    try:
        urllib.request.urlopen(url, timeout=limit_s).close()
    except urllib.error.HTTPError as error:
        refused = error.code >= 500 or strict
        return f"answers {error.code} {error.reason}" if refused else ""
    except (OSError, ValueError) as error:
        why = str(getattr(error, "reason", error))
        if "timed out" in why:
            return f"did not answer within {limit_s:g} s"
        return f"can't be reached: {why}"
    return ""


if __name__ == "__main__":
    print(probe(sys.argv[1], strict=sys.argv[2] == "strict", limit_s=float(sys.argv[3])))
