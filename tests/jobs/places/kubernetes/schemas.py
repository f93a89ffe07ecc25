"""Schemas of Kubeflow's custom resources. Like a strict API server, they refuse unknown fields."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.protocols import Validator

from jobs.places.kubernetes.manifests import Manifest

# What the real API server of the tests serves.
DEFINITION = Path(__file__).with_name("pytorchjobs.yaml")
# Kubeflow's full definitions, if they are beside the repository: they also check formats and limits.
FULL = Path(__file__).parents[5] / "shared" / "kubernetes"
_SCALARS = {"str": "string", "int": "integer", "bool": "boolean", "datetime": "string"}


@cache
def read_schemas(kind: str) -> list[Validator]:
    """Return a kind's schemas: of Kubeflow's models, and of each definition of it."""
    found = [_of_models(kind)]
    name = f"{kind.lower()}s.yaml"
    for path in (*DEFINITION.parent.glob(name), *FULL.glob(f"*_{name}")):
        (version,) = read_definition(path)["spec"]["versions"]
        schema = version["schema"]["openAPIV3Schema"]
        schema["properties"]["metadata"] = {"type": "object"}
        found.append(schema)
    formats = FormatChecker()
    return [Draft202012Validator(_closed(each), format_checker=formats) for each in found]


def read_definition(path: Path) -> Manifest:
    definition: Manifest = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
    return definition


def _of_models(kind: str) -> Manifest:
    # Half a second for one, four seconds for the other.
    if kind == "TrainJob":
        from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

        schema: Manifest = TrainerV1alpha1TrainJob.model_json_schema()
        # The models have a class for "text or number", which holds the value in a field.
        for name in schema["$defs"]:
            if name.endswith(("Quantity", "IntOrString")):
                schema["$defs"][name] = {"type": ["string", "integer"]}
        return schema
    from kubeflow.training import models

    return _of_type(models, "KubeflowOrgV1PyTorchJob")


def _of_type(models: Any, name: str) -> Manifest:
    """Return the schema of a type as OpenAPI's generator names it: int, list[V1EnvVar], dict(str, str)."""
    if parts := re.fullmatch(r"(list|dict)[\[(](?:str, )?(.+)[\])]", name, re.IGNORECASE):
        inner = _of_type(models, parts[2])
        if parts[1].lower() == "list":
            return {"type": "array", "items": inner}
        return {"type": "object", "additionalProperties": inner}
    if name == "object":
        return {}
    if name in _SCALARS:
        return {"type": _SCALARS[name]}
    model = getattr(models, name, None)
    if model is None:
        # The package lacks the class of elasticPolicy's metrics, which we don't use: no value is right.
        return {"not": {}}
    keys = model.attribute_map
    fields = {keys[each]: _of_type(models, its) for each, its in model.openapi_types.items()}
    return {"type": "object", "properties": fields}


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if schema.get("type") == "object" and "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed
