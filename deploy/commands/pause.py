"""`asyncrl pause` holds a running run back: samples in flight and the running step end, and nothing else begins until
`asyncrl unpause`. Workers keep their memory; nothing gets staler."""

from asyncrl.deploy.commands.sent_command import send


def main(arguments: list[str]) -> int:
    return send("pause", __doc__, arguments)
