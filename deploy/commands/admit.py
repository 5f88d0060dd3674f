"""`asyncrl admit` makes a key with which workers of one role may join runs."""

from pathlib import Path

from asyncrl.deploy.commands.command_parser import CommandParser


def main(arguments: list[str]) -> int:
    parser = CommandParser("asyncrl admit", description=__doc__)
    parser.add_argument("folder", type=Path, help="Folder of the keys of a controller, for fleet.join_keys.")
    parser.add_argument("role", help="Service whose workers may join with the key, such as generation.")
    parser.add_argument("--name", default="", help="Name of the key, for several of one role; default: the role.")
    asked = parser.parse_args(arguments)
    from asyncrl.config.install_hints import program
    from asyncrl.config.placement import JOINING_ROLES
    from asyncrl.config.sources.keys import closest
    from asyncrl.errors import ConfigError
    from asyncrl.fleet.launching.key_folder import KeyFolder
    from asyncrl.fleet.launching.run_access import MONITOR

    roles = (*JOINING_ROLES, MONITOR)
    if asked.role not in roles:
        near = f"; did you mean {found}?" if (found := closest(asked.role, roles)) else ""
        raise ConfigError(f"there is no role {asked.role!r}; there are {', '.join(roles)}{near}")
    key = KeyFolder.made(asked.folder).key_of(asked.role, asked.name)
    if asked.role == MONITOR:
        use = f"lets people watch runs: copy it to where only they read it, and watch with\n  {program()} monitor"
    else:
        use = (
            f"lets {asked.role} workers join: copy it to their hosts, where only they read it, and start each with\n"
            f"  {program()} serve {asked.role} --join"
        )
    print(
        f"{key} {use} tcp://HOST:PORT --key {key.name}\n"
        f"The run has fleet.join_keys = {str(asked.folder)!r}. Delete {key.with_suffix('.admitted')} to revoke the key."
    )
    return 0
