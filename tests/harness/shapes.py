"""AWS's service models as a contract: what a request or a raw answer has that its model lacks.

botocore drops unknown elements of an answer without a word, and checks no limits of a request.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from xml.etree import ElementTree

from botocore.model import OperationModel

Found = Iterator[str]
_PLACES = ("header", "headers", "statusCode", "uri", "querystring")
_TIMES = {
    "iso8601": re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"),
    "unixTimestamp": re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?"),
}
_SCALARS = {
    "boolean": re.compile("true|false"),
    "integer": re.compile(r"-?\d+"),
    "long": re.compile(r"-?\d+"),
    "float": re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE),
    "double": re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE),
}
# EC2 has new types before botocore knows them, and the product takes any.
_OPEN_ENUM = "InstanceType"
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "long": (int,),
    "float": (int, float),
    "double": (int, float),
    "timestamp": (int, float, str),
    "string": (str,),
    "character": (str,),
    "blob": (str,),
    "list": (list,),
    "map": (dict,),
    "structure": (dict,),
}


def protocol_of(operation: OperationModel) -> str:
    return str(operation.service_model.metadata["protocol"])


# Answers


def check_answer(operation: OperationModel, status: int, body: bytes) -> Found:
    """Yield what is wrong with an answer's body, each with the path of the element."""
    protocol = protocol_of(operation)
    if protocol not in ("ec2", "query", "json", "rest-json"):
        return
    try:
        content = _parse(protocol, body)
    except (ElementTree.ParseError, ValueError):
        yield f": the body is no {'JSON' if 'json' in protocol else 'XML'}"
        return
    if status >= 300:
        yield from (_check_xml_error if "json" not in protocol else _check_json_error)(
            operation, content
        )
    elif "json" in protocol:
        yield from _check_json(operation.output_shape, content, "")
    else:
        yield from _check_root(operation, content)


def _parse(protocol: str, body: bytes) -> Any:
    if "json" not in protocol:
        return ElementTree.fromstring(body)
    return json.loads(body) if body else {}


def _check_root(operation: OperationModel, root: Any) -> Found:
    """The elements around the output: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/Query-Requests.html"""
    shape = operation.output_shape
    if _tag(root) != f"{operation.name}Response":
        yield f": the root element is {_tag(root)}"
    if protocol_of(operation) == "ec2":
        # Actions without an output answer `return` alone.
        yield from _check_xml(shape, root, "", also=("requestId", "return"))
        return
    wrapper = shape.serialization.get("resultWrapper", "") if shape else ""
    for child in root:
        if wrapper and _tag(child) == wrapper:
            yield from _check_xml(shape, child, "")
        elif _tag(child) != "ResponseMetadata":
            yield f"{_tag(child)}: unknown element"


def _tag(node: Any) -> str:
    return str(node.tag).rpartition("}")[2]


def _check_xml(shape: Any, node: Any, path: str, also: tuple[str, ...] = ()) -> Found:
    kind = shape.type_name if shape else "structure"
    if kind in ("structure", "list", "map") and (node.text or "").strip():
        yield f"{path}: text in a {kind}"
    if kind == "structure":
        yield from _check_elements(shape, node, path, also)
    elif kind == "list":
        wanted = shape.member.serialization.get("name", "member")
        for child in node:
            if _tag(child) != wanted:
                yield f"{path}[]: an element {_tag(child)}, not {wanted}"
            yield from _check_xml(shape.member, child, f"{path}[]")
    elif kind == "map":
        yield from _check_entries(shape, node, path)
    else:
        if len(node):
            yield f"{path}: elements in a {kind}"
        yield from _check_text(shape, node.text or "", path)


def _check_elements(shape: Any, node: Any, path: str, also: tuple[str, ...]) -> Found:
    members = _members_by_tag(shape) if shape is not None else {}
    seen = set()
    for child in node:
        tag = _tag(child)
        name, member = members.get(tag, ("", None))
        if member is None:
            if tag not in also:
                yield f"{_join(path, tag)}: unknown element"
            continue
        if tag in seen:
            yield f"{_join(path, name)}: repeated"
        seen.add(tag)
        yield from _check_xml(member, child, _join(path, name))


@functools.cache
def _members_by_tag(shape: Any) -> dict[str, tuple[str, Any]]:
    found = {}
    for name, member in shape.members.items():
        tag = member.serialization.get("name", name)
        if member.serialization.get("location") not in _PLACES:
            found[tag] = (name, member)
    return found


def _check_entries(shape: Any, node: Any, path: str) -> Found:
    known = {
        shape.key.serialization.get("name", "key"): shape.key,
        shape.value.serialization.get("name", "value"): shape.value,
    }
    for part in (part for entry in node for part in entry):
        if _tag(part) not in known:
            yield f"{path}{{}}: unknown element {_tag(part)}"
        else:
            yield from _check_xml(known[_tag(part)], part, f"{path}{{}}")


def _check_text(shape: Any, text: str, path: str, default_time: str = "iso8601") -> Found:
    """A scalar as text."""
    kind = shape.type_name
    if kind == "timestamp":
        form = shape.serialization.get("timestampFormat", default_time)
        if form in _TIMES and not _TIMES[form].fullmatch(text):
            yield f"{path}: {text!r} is no {form} timestamp"
    elif kind in _SCALARS and not _SCALARS[kind].fullmatch(text):
        yield f"{path}: {text!r} is no {kind}"
    elif shape.name != _OPEN_ENUM and shape.metadata.get("enum") and text not in shape.enum:
        yield f"{path}: {text!r} is not in its enum"


def _check_json(shape: Any, value: Any, path: str) -> Found:
    if shape is None:
        if value != {}:
            yield f"{path}: content that the model lacks"
        return
    kind = shape.type_name
    if not _is_of(kind, value):
        yield f"{path}: a {type(value).__name__}, not a {kind}"
    elif kind == "structure":
        yield from _check_members(shape, value, path)
    elif kind == "list":
        for item in value:
            yield from _check_json(shape.member, item, f"{path}[]")
    elif kind == "map":
        for key, item in value.items():
            yield from _check_json(shape.key, key, f"{path}{{}}")
            yield from _check_json(shape.value, item, f"{path}{{}}")
    else:
        text = str(value).lower() if kind == "boolean" else str(value)
        yield from _check_text(shape, text, path, "unixTimestamp")


def _is_of(kind: str, value: Any) -> bool:
    """Return whether a value of JSON is of a shape's kind; in Python, a bool is an int."""
    return isinstance(value, _JSON_TYPES[kind]) and isinstance(value, bool) == (kind == "boolean")


def _check_members(shape: Any, value: Mapping[str, Any], path: str) -> Found:
    members = _members_by_tag(shape)
    for key, item in value.items():
        if key not in members:
            yield f"{_join(path, key)}: unknown member"
        # An answer's null is an absent member: https://smithy.io/2.0/aws/protocols/aws-restjson1-protocol.html
        elif item is not None:
            name, member = members[key]
            yield from _check_json(member, item, _join(path, name))
    names = {name: key for key, (name, _) in members.items()}
    for name in shape.required_members:
        if name in names and names[name] not in value:
            yield f"{_join(path, name)}: missing"


# Errors


def _check_xml_error(operation: OperationModel, root: Any) -> Found:
    """EC2's and the query protocol's errors have different frames:

    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html#api-error-response
    """
    ec2 = protocol_of(operation) == "ec2"
    frame = "Response/Errors/Error" if ec2 else "ErrorResponse/Error"
    top, *inner = frame.split("/")
    error = root.find("/".join(f"{{*}}{name}" for name in inner))
    if _tag(root) != top or error is None:
        yield f": no error at {frame}"
    else:
        # EC2 has been seen to send an empty message: moto's InvalidSnapshotIdError.
        texts = {_tag(node): node.text for node in error}
        yield from (f"{frame}/{n}: missing" for n in ("Code", "Message") if n not in texts)
        if not texts.get("Code", "c"):
            yield f"{frame}/Code: empty"
    request_id = "RequestID" if ec2 else "RequestId"
    if request_id not in {_tag(child) for child in root}:
        yield f"{request_id}: missing"


def _check_json_error(_: OperationModel, content: Any) -> Found:
    """https://smithy.io/2.0/aws/protocols/aws-json-1_1-protocol.html#operation-error-serialization"""
    if not isinstance(content, dict):
        yield ": the error is no object"
    elif not isinstance(content.get("__type"), str):
        yield "__type: missing"
    elif not {"message", "Message"} & content.keys():
        yield "message: missing"


# Requests


def check_request(operation: OperationModel, parameters: Mapping[str, Any]) -> Found:
    """Yield what is wrong with a call's parameters, whose names and types botocore itself checks."""
    if protocol_of(operation) == "rest-xml" or operation.input_shape is None:
        return
    yield from _check_parameters(operation.input_shape, parameters, "")
    if protocol_of(operation) == "ec2":
        filters = parameters.get("Filters", parameters.get("Filter", ()))
        names = [str(each.get("Name", "")) for each in filters]
        unknown = _unknown_filters(operation.input_shape, names) if names else ()
        yield from (f"Filters: no filter {name!r}" for name in unknown)


_CODE = re.compile(r"<code>([^<&]+)")


@functools.cache
def _named_in(documentation: str) -> frozenset[str]:
    return frozenset(_CODE.findall(documentation))


def _unknown_filters(request: Any, names: Iterable[str]) -> list[str]:
    """Return the filters that an action does not have, according to its documentation in botocore's model."""
    # For some actions, the parameter is called Filter.
    filters = request.members.get("Filters", request.members.get("Filter"))
    known = _named_in(filters.documentation)
    # The documentation lists `tag:<key>` or only `tag`.
    has_tags = not known.isdisjoint({"tag", "tag:"})
    return [n for n in names if n not in known and not (has_tags and n.startswith("tag:"))]


def _check_parameters(shape: Any, value: Any, path: str) -> Found:
    if shape.type_name == "structure":
        for name, item in value.items():
            member, inner = shape.members[name], _join(path, name)
            if member._shape_model.get("deprecated"):
                yield f"{inner}: deprecated"
            yield from _check_parameters(member, item, inner)
    elif shape.type_name == "list":
        for item in value:
            yield from _check_parameters(shape.member, item, f"{path}[]")
    elif shape.type_name == "map":
        for item in value.values():
            yield from _check_parameters(shape.value, item, f"{path}{{}}")
    elif shape.type_name == "string":
        yield from _check_text(shape, value, path)
    yield from _check_limits(shape, value, path)


def _check_limits(shape: Any, value: Any, path: str) -> Found:
    """A request's pattern and limits. Responses may be ahead of them."""
    limits = shape.metadata
    size = _size(shape, value)
    if size is not None and not limits.get("min", size) <= size <= limits.get("max", size):
        yield f"{path}: {size:g} is outside its limits"
    pattern = limits.get("pattern", "")
    # Python's expressions lack Unicode's classes.
    if r"\p{" not in pattern and not re.search(pattern, str(value)):
        yield f"{path}: {value!r} does not match {pattern}"


def _size(shape: Any, value: Any) -> float | None:
    """Return what a shape's limits mean: a number's value, or a length."""
    if shape.type_name in ("integer", "long", "float", "double"):
        return float(value)
    return len(value) if shape.type_name in ("string", "list", "map") else None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
