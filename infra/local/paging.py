"""Pages of results, which moto lacks for all but instances.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/Query-Requests.html#api-pagination
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import botocore.session


@functools.cache
def _result_keys() -> dict[str, str]:
    """Return the element that has the results, for each action whose results come in pages."""
    loader = botocore.session.get_session().get_component("data_loader")
    pages = loader.load_service_model("ec2", "paginators-1")["pagination"]
    return {action: page["result_key"] for action, page in pages.items() if "limit_key" in page}


def pages_of(action: str, params: Mapping[str, Any], page_size: int) -> int:
    """Return the results per page; 0 for all. Resources that are named by their ids come together."""
    if action not in _result_keys() or any(name.endswith("Ids") for name in params):
        return 0
    return int(params.get("MaxResults", page_size))


def cut(action: str, result: Any, params: Mapping[str, Any], size: int) -> Any:
    """Return one page of an answer's results. A page's token is the number of its first result."""
    key = _result_keys().get(action, "")
    if not size or not isinstance(result, dict) or key not in result or "NextToken" in result:
        return result
    first, found = int(params.get("NextToken", 0)), list(result[key])
    rest = {"NextToken": str(first + size)} if len(found) > first + size else {}
    return {**result, key: found[first : first + size], **rest}
