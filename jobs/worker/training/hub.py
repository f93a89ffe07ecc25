"""The trained model on the hub: ``--push-to hub:ORG/NAME``."""

from __future__ import annotations

import json
import re
import shlex
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from ..runtime.errors import first_line
from ..runtime.output import save_json, state_folder
from .card import read_record
from .options import HUB
from .state import TrainContext

TALK_SECONDS = 60.0
"""Time between two messages in which rank 0 tells the others that it is still sending the model."""
_REPLACED = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|adapter_(config\.json|model\.safetensors)"
    r"|modules\.json|tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.(txt|json)|merges\.txt|(tokenizer|sentencepiece|spiece)(\.bpe)?\.model"
    r"|chat_template\.\w+|generation_config\.json|(openvino|\d_[A-Z]\w*)/[^/]+"
)
"""Files of an earlier model that would be loaded with this one, or instead of it."""
_DELETE = tuple(
    f"--delete={name}"
    for name in ("adapter_config.json", "adapter_model.safetensors", "modules.json", "openvino/*")
)


def push_model(context: TrainContext, target: str, step: int) -> dict[str, str]:
    """Send the model, of this step, to ``hub:ORG/NAME``, from rank 0, while the others wait.

    Returns ``pushed_to``, its address there, or ``push_error``: the job does not fail with it. A restarted
    job does not send the same model again.
    """
    repo, ranks = target.removeprefix(HUB), context.ranks
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(_push, context, repo, step) if ranks.first else None
        while not ranks.share(bool(sending and wait([sending], TALK_SECONDS).done)):
            pass
    if sending is None:
        return {}
    # The library raises its own types, those of its HTTP client, OSError, and ValueError.
    if error := sending.exception():
        folder = Path(read_record().get("more", {}).get("results", context.output), "model")
        # A refusal of the hub says all; other errors may only name the file.
        cause = None if hasattr(error, "response") else error.__cause__
        reasons = [first_line(each) for each in (error, cause) if each]
        why = f"the model was not pushed to {target}: {': '.join(reasons)}"
        again = shlex.join(["hf", "upload", repo, str(folder), "--private", *_DELETE])
        context.events.warn(f"warning: {why}; to do it later: {again}")
        return {"push_error": f"{why}; to do it later: {again}"}
    context.events.note(f"the model is at {sending.result()}")
    return {"pushed_to": sending.result()}


def _push(context: TrainContext, repo: str, step: int) -> str:
    """Send the folder ``model``, unless it was sent before a restart, and return its address."""
    from huggingface_hub import HfApi  # noqa: PLC0415 - reads variables when imported

    folder, mark = context.output / "model", state_folder(context.output) / "pushed.json"
    api, sent = HfApi(), {"repo": repo, "step": step}
    is_sent = context.options.resume and mark.exists()
    if not is_sent or json.loads(mark.read_text(encoding="utf-8")) != sent:
        api.create_repo(repo, private=True, exist_ok=True)
        old = [name for name in api.list_repo_files(repo) if _REPLACED.fullmatch(name)]
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message="Trained by spr-cluster",
            # Patterns, but none of these names has a wildcard; `*` would also match other folders.
            delete_patterns=old,
        )
        save_json(mark, sent)
    return f"{api.endpoint}/{repo}"
