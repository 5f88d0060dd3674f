import pytest

from asyncrl.bench.transfer_speed.weight_transfers import SIDES, main


@pytest.mark.timeout(120)
def test_every_way_moves_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--megabytes", "4", "--rounds", "2"])
    printed = capsys.readouterr().out
    for side in SIDES:
        assert f"\n  {side} " in printed
    assert printed.count("goal at least 0.7") == 3
