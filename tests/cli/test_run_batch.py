"""`vllm run-batch`: what it refuses before an engine starts."""

import pytest


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "needs -i INPUT and -o OUTPUT"),
        (("-i", "{in}", "-o", "{in}"), "is the input too"),
        (("-i", "{in}", "-o", "-", "--resume"), "--resume: - cannot be read back"),
        (("-i", "{in}", "-o", "http://h/x", "--resume"), "cannot be read back"),
        (("-i", "{in}", "-o", "{in}x", "--output-tmp-dir", "t"), "--output-tmp-dir: is for results"),
        (("-i", "{in}", "-o", "{in}x", "--ssl-keyfile", "k"), "unknown flag --ssl-keyfile"),
        (("-i", "{in}", "-o", "{in}x", "--lora-modules", "a=b"), "--lora-modules"),
    ],
)
def test_a_wrong_line_is_refused_with_the_reason(fails, tmp_path, argv, message):
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    line, code = fails("run-batch", *(word.replace("{in}", str(source)) for word in argv))
    assert code == 2
    assert message in line
    assert source.read_text() == "{}\n"


def test_a_missing_input_ends_before_the_engine_starts(fails, tmp_path):
    line, code = fails("run-batch", "-i", str(tmp_path / "nosuch"), "-o", str(tmp_path / "o"))
    assert code == 1
    assert "nosuch" in line
    assert not (tmp_path / "o").exists()
