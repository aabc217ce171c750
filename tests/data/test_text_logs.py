"""Text logs are read with any separator, compression and number of files, and bad lines are reported with the line
number of an editor."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.imported import HEADER, histories, import_events, rows

EXPECTED = [(0, ["b", "a"], [1, 2])]
LINES = "u,a,2\nu,b,1\n"


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_is_detected_from_the_header_and_logged(
    tmp_path: Path, separator: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert histories((HEADER + LINES).replace(",", separator), tmp_path, name=f"guess-{ord(separator)}.csv") == EXPECTED
    assert ("fields are separated by" in capsys.readouterr().err) == (separator != ",")


def test_commas_inside_column_names_do_not_mislead_detection(tmp_path: Path) -> None:
    assert histories("user;item;time;a,b,c,d,e\nu;a;2;0\nu;b;1;0\n", tmp_path) == EXPECTED


def test_backslash_t_is_a_tab(tmp_path: Path) -> None:
    assert histories((HEADER + LINES).replace(",", "\t"), tmp_path, "--separator", "\\t") == EXPECTED


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--separator", "::"), "--separator '::' is not a single character"),
        (("--separator", "§"), "not a single character"),
        (("--quote", "''"), "--quote '''' is not a single character"),
        (("--separator", ";", "--quote", ";"), "are the same"),
        (("--max-history", "-1"), "--max-history -1 is below 1"),
        (("--memory-mb", "0"), "--memory-mb 0 is below 1"),
    ],
)
def test_invalid_options_fail_before_the_log_is_read(
    tmp_path: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert import_events(tmp_path / "nothing.csv", *words, target=tmp_path / "data") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bom.csv", ("\ufeff" + HEADER + LINES).encode()),
        ("crlf.csv", (HEADER + LINES).replace("\n", "\r\n").encode()),
        ("no-end.csv", (HEADER + LINES).rstrip("\n").encode()),
        ("blank.csv", (HEADER + "\n" + LINES + "\n\n").encode()),
        ("packed.csv.gz", gzip.compress((HEADER + LINES).encode(), mtime=0)),
        ("twice.csv", b"user,x,item,x,time\nu,1,a,1,2\nu,1,b,1,1\n"),
        ("spans.csv", b'user,item,text,time\nu,a,"two\nlines",2\nu,b,"",1\n'),
        ("order.csv", b"order,_order,_number,user,item,time,last\n1,1,1,u,a,2,1\n1,1,1,u,b,1,1\n"),
        ("log.jsonl", b'{"user": "u", "item": "a", "time": 2}\n\n{"item": "b", "time": "1", "user": "u", "x": [1]}\n'),
        (
            "log.ndjson.gz",
            gzip.compress(b'{"user":"u","item":"a","time":2}\n{"user":"u","item":"b","time":1.0}', mtime=0),
        ),
    ],
)
def test_a_log_is_read_in_each_supported_form(tmp_path: Path, name: str, content: bytes) -> None:
    assert histories(content, tmp_path, name=name) == EXPECTED


def test_utf_16_is_supported(tmp_path: Path) -> None:
    text = (HEADER + "u,é,1\n").encode("utf-16")
    assert histories(text, tmp_path, "--encoding", "utf-16") == [(0, ["é"], [1])]


def test_folders_and_globs_are_read_in_name_order(tmp_path: Path) -> None:
    for name, item in (("b/part-0.csv", "a"), ("a/part-0.csv", "b"), ("a/_SUCCESS", ""), ("a/.part-0.csv.crc", "")):
        (tmp_path / "log" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "log" / name).write_text(item and f"{HEADER}u,{item},1\n")
    for number, source in enumerate(("log", "log/*/*.csv", "log/**/*.csv")):
        assert import_events(tmp_path / source, target=tmp_path / str(number)) == 0
        assert [row["item_id"] for row in rows(tmp_path / str(number))] == [["b", "a"]]


def test_parquet_files_may_differ_in_unread_columns(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    times = pa.array([2], pa.int32())
    pq.write_table(pa.table({"user": ["u"], "item": ["a"], "time": times}), tmp_path / "log" / "0")
    pq.write_table(pa.table({"x": [1], "time": [1], "item": ["b"], "user": ["u"]}), tmp_path / "log" / "1")
    assert import_events(tmp_path / "log", target=tmp_path / "data") == 0
    assert [row["item_id"] for row in rows(tmp_path / "data")] == [["b", "a"]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("log.json", b'[{"user": 1}]', "one JSON array"),
        ("log.xlsx", b"PK\x03\x04...", "archive or a spreadsheet"),
        ("log.jsonl", b'{"usr": 1, "item": 1, "time": 1}\n', "did you mean 'usr'?"),
        ("log.csv", b"user,item,item,time\n1,2,3,4\n", "2 columns 'item'"),
        ("log.csv", b"user,item,time\n1,\xe9,4\n", "cannot be read"),
        ("log.parquet", HEADER.encode(), "cannot be read"),
        ("log?.csv", None, "no file matches the pattern"),
        ("", None, "no files"),
    ],
)
def test_an_unsupported_file_type_is_reported(
    tmp_path: Path, name: str, content: bytes | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    if content is not None:
        (tmp_path / "in" / name).write_bytes(content)
    assert import_events(tmp_path / "in" / name, target=tmp_path / "data") == 3
    output = capsys.readouterr().err
    assert message in output
    assert "where:" in output
    assert "remedy:" in output


def test_files_of_several_formats_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text(HEADER + LINES)
    (tmp_path / "in" / "b.jsonl").write_text('{"user": "u", "item": "a", "time": 2}\n')
    assert import_events(tmp_path / "in", target=tmp_path / "data") == 3
    assert "mixes formats: a.csv is csv, b.jsonl is jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["order", "_file", "timestamp", "label_x", "candidate_id"])
def test_a_feature_keeps_its_name_or_is_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.csv").write_text(f"user,item,time,{name}\nu,a,1,7\n")
    code = import_events(tmp_path / "log.csv", "--features", name, target=tmp_path / "data")
    assert code == (0 if name == "order" else 3)
    assert ("cannot be called" in capsys.readouterr().err) == bool(code)


def test_distinct_keys_never_become_one_integer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.csv").write_text(HEADER + "1,7,1\n" * 10_001 + "1,007,1\n")
    assert import_events(tmp_path / "log.csv", target=tmp_path / "data") == 3
    assert "log.csv, line 10003" in capsys.readouterr().err


def rejected_lines(folder: Path, source: Path) -> dict[int, str]:
    """Reasons of rejection by line or row, from an import with on_bad = skip."""
    assert import_events(source, "--on-bad", "skip", target=folder / "data") == 0
    lines = [json.loads(line) for line in (folder / "data.quarantine.jsonl").read_text().splitlines()]
    return {line["row"] if line["line"] is None else line["line"]: line["what"] for line in lines}


def test_bad_input_in_text_is_reported_by_line(tmp_path: Path) -> None:
    lines = [
        "user,item,text,time",
        "u,a,x,1",
        "",
        'u,b,"two',
        'lines",1',
        "u,c",
        "u,d,x,soon",
        "",
        ",e,x,1",
        'u,"f',
        'g",x,1',
    ]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\nu,h,x,1,2\n")
    result = rejected_lines(tmp_path, tmp_path / "log.csv")
    assert result == {
        6: "the line has 2 fields instead of 4",
        7: "timestamp missing or not of its type",
        9: "user_id missing or not of its type",
        10: "a field spans several lines",
        12: "the line has 5 fields instead of 4",
    }


def test_line_numbers_are_correct_across_blocks(tmp_path: Path) -> None:
    text = "".join(
        f'u{"x" * 50},i,"{n}\n",{"soon" if n % 9000 == 0 else n}\n' + "short\n" * (n % 7000 == 0) for n in range(40_000)
    )
    (tmp_path / "log.csv").write_text("user,item,text,time\n" + text)
    (tmp_path / "log.csv").write_text(written := (tmp_path / "log.csv").read_text())
    expected = {n for n, line in enumerate(written.split("\n"), 1) if line == "short"}
    expected |= {n - 1 for n, line in enumerate(written.split("\n"), 1) if line == '",soon'}
    assert set(rejected_lines(tmp_path, tmp_path / "log.csv")) == expected
    assert len(expected) == 11


def test_bad_input_in_json_lines_is_reported_by_line(tmp_path: Path) -> None:
    text = '{"user": "u", "item": 1, "time": 5}\n\nnot json\n{"user": "u", "item": 3}\n{"user": "u"\n'
    (tmp_path / "log.jsonl").write_text(text)
    assert sorted(rejected_lines(tmp_path, tmp_path / "log.jsonl")) == [3, 4, 5]


def test_bad_input_in_parquet_is_reported_by_file_and_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"user": [1, 1], "item": [1, 2], "time": [1, 2]}), tmp_path / "in" / "a.parquet")
    bad = pa.table({"user": [1, 1, None], "item": [1, 2, 3], "time": [1, 2, 3]})
    pq.write_table(bad, tmp_path / "in" / "b.parquet")
    assert import_events(tmp_path / "in", target=tmp_path / "data") == 3
    assert f"where:  {tmp_path}/in/b.parquet, row 2\n" in capsys.readouterr().err


def test_bad_input_in_lists_of_items_is_reported_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from freescale.cli.main import main

    (tmp_path / "log.txt").write_text("1 2 3\n" * 6000 + "\nx 2 3\n")
    assert main(["data", "import", "amazon", str(tmp_path / "log.txt"), str(tmp_path / "data")]) == 3
    assert "log.txt, line 6002" in capsys.readouterr().err
