"""`asyncrl unpause` lets a paused run go on."""

from asyncrl.deploy.commands.sent_command import send


def main(arguments: list[str]) -> int:
    return send("unpause", __doc__, arguments)
