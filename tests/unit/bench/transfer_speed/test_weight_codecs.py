import pytest

from asyncrl.bench.transfer_speed.weight_codecs import CodecRounds, main


def test_bytes_are_those_of_the_codecs() -> None:
    measured = CodecRounds.of(5 << 20, "float32", 0.01, rounds=1)
    assert 60 < measured.factor("sparse") < 70
    assert measured.factor("bfloat16") == 2
    assert 4.5 < measured.factor("fp8") < 5
    assert {chunk.size for chunk in measured.encoded["dense"]} == {2 << 20, 1 << 20}


def test_rows_name_every_codec_and_what_travels(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--megabytes", "1", "--rounds", "1", "--changed", "0.5"])
    printed = capsys.readouterr().out
    for name in ("dense", "sparse (travels dense)", "float16 (travels dense)", "fp8", "digest of all bytes"):
        assert f"\n  {name} " in printed
    assert "MISSED  fewer bytes of a difference: 1, goal at least 20" in printed
