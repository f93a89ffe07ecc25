"""The cloud-init user data of every node: quiet at boot, and gone when its time is up. Pure.

Nothing secret is ever in it: user data can be read by everybody on the machine.
"""

from __future__ import annotations

import json
from datetime import datetime

# cloud-init reads JSON as the YAML that it is, so no template can break it.
_HEADER = "#cloud-config\n"


def render_user_data(expires: datetime) -> str:
    """User data that powers the machine off at ``expires``; EC2 then terminates it.

    The date is absolute, so that a reboot does not prolong it, and it is looked at every half
    minute: a machine that boots after it, or that was stopped over it, ends itself, too.
    """
    timer = (
        "[Timer]\nOnBootSec=30s\nOnUnitInactiveSec=30s\nAccuracySec=1s\n"
        "[Install]\nWantedBy=timers.target\n"
    )
    over = f"[ $$(date +%%s) -lt {int(expires.timestamp())} ]"
    service = f"[Service]\nType=oneshot\nExecStart=/bin/sh -c '{over} || systemctl poweroff'\n"
    units = "/etc/systemd/system/spr-cluster-ttl"
    config = {
        "package_update": False,
        # Fresh Ubuntu's own updates would hold the package lock and steal cores from training.
        "bootcmd": ["systemctl mask --now apt-daily.timer apt-daily-upgrade.timer || true"],
        "write_files": [
            {"path": f"{units}.timer", "content": timer},
            {"path": f"{units}.service", "content": service},
        ],
        "runcmd": [
            "systemctl daemon-reload",
            "systemctl enable spr-cluster-ttl.timer",
            "systemctl restart spr-cluster-ttl.timer",
        ],
    }
    return _HEADER + json.dumps(config, indent=1) + "\n"
