"""How a command that was broken off ends."""

from hamu.cli import main, methods


def test_ctrl_c_ends_a_command_with_130_and_one_line(monkeypatch, capsys):
    def broken_off(argv, console):
        raise KeyboardInterrupt

    monkeypatch.setattr(methods, "run", broken_off)
    assert main(["methods"]) == 130
    assert capsys.readouterr().err == "hamu methods: interrupted\n"
