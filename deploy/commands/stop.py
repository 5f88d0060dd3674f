"""`asyncrl stop` ends a running run with a checkpoint, after its running step, as the first Ctrl-C does."""

from asyncrl.deploy.commands.sent_command import send


def main(arguments: list[str]) -> int:
    return send("stop", __doc__, arguments)
