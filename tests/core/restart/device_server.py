"""A server with the transport of a rig, as the child of a keeper. The variable `RIG` names the rig."""

from __future__ import annotations

import os
import sys

from kvf_dev.testing.transport.engine import registry_for
from kvf_dev.testing.transport.node import rig_told, settings_for
from kvframework.config.load import load_config
from kvframework.keeper.sd_notify import Keeper
from kvframework.server import Server

RIG = "KVFRAMEWORK_TEST_RIG"


def main(arguments: list[str]) -> None:
    keeper = Keeper.from_environment()
    assert keeper is not None
    rig = rig_told(os.environ[RIG])
    own = [setting for setting in arguments if "=" in setting]
    (endpoint,) = [setting.partition("=")[2] for setting in own if setting.startswith("server.endpoint=")]
    settings = load_config(None, (*own, *settings_for(rig, endpoint)))
    server = Server(settings, registry_for(rig), keeper)
    server.bind()
    keeper.ready()
    server.serve_forever(process_ends=True)


if __name__ == "__main__":
    main(sys.argv[1:])
