from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

from provision.user_data import render_user_data


def test_the_machine_ends_itself_at_an_absolute_time() -> None:
    east = timezone(timedelta(hours=2))
    text = render_user_data(datetime(2026, 7, 31, 22, 0, tzinfo=east))

    header, _, body = text.partition("\n")
    config = json.loads(body)
    files = {file["path"]: file["content"] for file in config["write_files"]}

    assert header == "#cloud-config"
    timer = files["/etc/systemd/system/spr-cluster-ttl.timer"]
    assert "OnCalendar=2026-07-31 20:00:00 UTC\n" in timer
    # A past date must not fire on an image's next machine.
    assert "Persistent" not in timer
    assert "poweroff" in files["/etc/systemd/system/spr-cluster-ttl.service"]
    assert config["runcmd"][-1] == "systemctl restart spr-cluster-ttl.timer"
