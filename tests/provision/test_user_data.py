from __future__ import annotations

import json
import shlex
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from provision.user_data import render_user_data


@pytest.mark.parametrize(("seconds_left", "ends"), [(3600, False), (-1, True), (-(10**6), True)])
def test_the_machine_ends_itself_at_an_absolute_time_however_late_it_looks(
    tmp_path: Path, seconds_left: int, ends: bool
) -> None:
    expires = datetime.now(timezone(timedelta(hours=2))) + timedelta(seconds=seconds_left)
    text = render_user_data(expires)

    header, _, body = text.partition("\n")
    config = json.loads(body)
    files = {file["path"]: file["content"] for file in config["write_files"]}

    assert header == "#cloud-config"
    # It is looked at again and again, so that no reboot, image or slow boot can miss it.
    assert "OnUnitInactiveSec=30s" in files["/etc/systemd/system/spr-cluster-ttl.timer"]
    service = files["/etc/systemd/system/spr-cluster-ttl.service"]
    (line,) = [x for x in service.splitlines() if x.startswith("ExecStart=")]
    # What systemd makes of its two escapes.
    command = line.removeprefix("ExecStart=").replace("$$", "$").replace("%%", "%")
    (tmp_path / "systemctl").write_text(f"#!/bin/sh\necho $1 >> {tmp_path}/called\n")
    (tmp_path / "systemctl").chmod(0o755)
    subprocess.run(
        shlex.split(command), env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=False, timeout=30
    )
    assert (tmp_path / "called").exists() is ends
    assert config["runcmd"][-1] == "systemctl restart spr-cluster-ttl.timer"
