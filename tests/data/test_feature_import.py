"""Features of events, items and users, and labels of events, pass through an import with their missing values."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from freescale.cli.main import main
from tests.data.imported import import_events, manifest, named_rows, rows
from tests.support.datasets import loader

LOG = """user,item,time,price,brand,code,tags,action
u,c,3,30.5,x,7,a|b,5
u,a,1,,,,,
u,b,2,20,y,9,b,9223372036854775807
v,a,2,5,x,7, c |a|a|,-1
"""
KINDS = ["price", "brand", "code:id", "tags:set", "action:bits"]
EXPECTED = [
    {"price": [5], "brand": ["x"], "code": ["7"], "tags": [["c", "a"]], "action": [-1]},
    {
        "price": [None, 20, 30.5],
        "brand": [None, "y", "x"],
        "code": [None, "9", "7"],
        "tags": [None, ["b"], ["a", "b"]],
        "action": [None, 2**63 - 1, 5],
    },
]
ITEMS = "item,kind,size,genres\na,book,3,x|y\nb,,2,\nd,toy,1,z\n"
USERS = "user,region,age,languages\nu,eu,30,de|en\nw,us,20,en\n"
TABLES = ["--items", "items.csv", "--item-features", "kind", "size", "genres:set"]
TABLES += ["--users", "users.csv", "--user-features", "region", "age", "languages:set"]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("log.csv", LOG), ("items.csv", ITEMS), ("users.csv", USERS)):
        Path(name).write_text(text)


def imported(*words: str, source: str = "log.csv", target: str = "data") -> list[dict[str, Any]]:
    assert import_events(source, *words, target=Path(target)) == 0
    return named_rows(Path(target))


def chosen(result: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in result]


def write_as(form: str) -> str:
    """The log in another form; a set is a list where the form has lists."""
    frame = pl.read_csv("log.csv", schema_overrides={"action": pl.Int64}, infer_schema_length=None)
    lists = frame.with_columns(pl.col("tags").str.split("|").list.eval(pl.element().str.strip_chars()))
    if form == "jsonl":
        lists.write_ndjson("log.jsonl")
        return "log.jsonl"
    if form == "parquet":
        lists.write_parquet("log.parquet")
        return "log.parquet"
    return "log.csv"


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_every_kind_of_feature_keeps_its_values_and_stays_null_where_missing(form: str) -> None:
    result = imported("--features", *KINDS, source=write_as(form))
    assert [{name: row[name] for name in EXPECTED[0]} for row in result] == EXPECTED
    stored = pq.read_schema(next(Path("data").glob("part-*.parquet")))
    assert stored.field("tags").type == pa.list_(pa.list_(pa.int64()))
    assert stored.field("brand").type == stored.field("action").type == pa.list_(pa.int64())


def test_ids_are_numbered_by_popularity_then_by_key() -> None:
    Path("log.csv").write_text(LOG.replace("x,", "z,") + "v,b,5,1,w,9,c|b,1\nv,b,6,1,w,9,c|0,1\n")
    imported("--features", *KINDS)
    counts = {name: pl.read_parquet(f"data/vocabulary-{name}.parquet").rows() for name in ("brand", "code", "tags")}
    assert counts == {
        "brand": [("w", 2), ("z", 2), ("y", 1)],
        "code": [("9", 3), ("7", 2)],
        "tags": [("b", 3), ("c", 3), ("a", 2), ("0", 1)],
    }
    assert manifest(Path("data")).features == {"brand": 3, "code": 2, "tags": 4}
    assert rows(Path("data"))[0]["brand"] == [None, 2, 1]


def test_quoted_text_is_one_key_and_a_set_is_split_at_any_separator() -> None:
    Path("log.csv").write_text('user,item,time,name,tags\nu,a,1,"x,y|z","1, 2,1"\nu,b,2,"say ""no""","[live],"\n')
    (row,) = imported("--features", "name", "tags:set", "--set-separator", ",")
    assert chosen([row], "name", "tags") == [(["x,y|z", 'say "no"'], [["1", "2"], ["[live]"]])]


def test_sets_in_json_lines_are_lists_or_text() -> None:
    values = [["a", "b|c", 1, None, ""], "a|d", None, "", [], "[bad]", ['x"y'], [True, 2.5]]
    lines = [{"user": "u", "item": "i", "time": time, "tags": value} for time, value in enumerate(values)]
    Path("log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = imported("--features", "tags:set", source="log.jsonl")
    assert row["tags"] == [["a", "b|c", "1"], ["a", "d"], None, None, [], ["[bad]"], ['x"y'], ["true", "2.5"]]


def test_lists_need_no_kind_and_parquet_numbers_keep_their_type() -> None:
    table = {"user": ["u"], "item": ["a"], "time": [1], "tags": [[3, 1]], "flag": [True]}
    small = pa.array([7], pa.int16())
    pq.write_table(pa.table({**table, "small": small}), "log.parquet")
    (row,) = imported("--features", "tags", "flag", "small", source="log.parquet")
    assert chosen([row], "tags", "flag", "small") == [([["3", "1"]], [True], [7])]
    assert pq.read_schema(next(Path("data").glob("part-*.parquet"))).field("small").type == pa.list_(pa.int16())


def test_features_of_items_and_users_are_joined_and_missing_without_a_line() -> None:
    names = ("item_id", "kind", "size", "genres", "region", "age", "languages")
    assert chosen(imported(*TABLES), *names) == [
        (["a"], ["book"], [3], [["x", "y"]], None, None, None),
        (["a", "b", "c"], ["book", None, None], [3, 2, None], [["x", "y"], None, None], "eu", 30, ["de", "en"]),
    ]
    assert pl.read_parquet("data/vocabulary-kind.parquet").rows() == [("book", 2)]  # as often as its items occur


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_side_tables_have_any_form_and_other_types_of_keys(form: str) -> None:
    Path("log.csv").write_text("user,item,time\n1,7,1\n1,8,2\n")
    frame = pl.DataFrame({"item": ["7", "007", "x"], "kind": ["book", "no", "no"]})
    if form == "csv":
        frame.write_csv("items.csv")
    elif form == "jsonl":
        frame.write_ndjson("items.csv")
    else:
        frame.write_parquet("items.csv")
    assert chosen(imported("--items", "items.csv", "--item-features", "kind"), "kind") == [(["book", None],)]


def test_candidates_have_the_features_of_their_items() -> None:
    Path("shown.csv").write_text("user,item,time,click\nu,b,3,1\nu,d,3,0\nv,new,9,1\n")
    words = [*TABLES, "--features", "tags:set", "--impressions", "shown.csv", "--labels", "click"]
    result = imported(*words)
    names = ("item_id", "tags", "kind", "candidate_id", "candidate_kind", "candidate_size", "candidate_genres", "age")
    assert chosen(result, *names) == [
        (["a", "b"], [None, ["b"]], ["book", None], ["b", "d"], [None, "toy"], [2, 1], [None, ["z"]], 30),
        (["a"], [["c", "a"]], ["book"], ["new"], [None], [None], [None], None),
    ]


def test_event_labels_are_numbers_or_missing() -> None:
    Path("log.csv").write_text("user,item,time,stars,liked\nu,a,1,4,true\nu,b,2,,\nu,c,3,0.5,False\n")
    result = imported("--event-labels", "stars", "liked")
    assert chosen(result, "label_stars", "label_liked") == [([4, None, 0.5], [1, None, 0])]
    assert pq.read_schema(next(Path("data").glob("part-*.parquet"))).field("label_stars").type == pa.list_(pa.float32())


def test_a_later_import_keeps_all_ids_and_hashes_unknown_keys_stably(capsys: pytest.CaptureFixture[str]) -> None:
    imported(*TABLES, "--features", *KINDS)
    first = rows(Path("data"))
    Path("log.csv").write_text(LOG + "v,b,9,1,new,7,a|new|other,1\nv,b,9,1,new,7,new,1\n")
    Path("items.csv").write_text(ITEMS.replace("b,,2,", "b,comic,2,y|w"))
    words = [*TABLES, "--features", *KINDS, "--vocabulary", "data"]
    assert import_events("log.csv", *words, target=Path("later")) == 0
    Path("more.csv").write_text(Path("log.csv").read_text() + "u,a,0,1,a new brand,7,a new tag,1\n")
    assert import_events("more.csv", *words, target=Path("again")) == 0
    later, again = ([row for row in rows(Path(t)) if row["user_id"] == 1] for t in ("later", "again"))
    assert later == again
    (row,) = later
    (before,) = [row for row in first if row["user_id"] == 1]
    assert (row["brand"][0], row["tags"][0], row["kind"][0]) == (
        before["brand"][0],
        before["tags"][0],
        before["kind"][0],
    )
    assert row["brand"][1] == row["brand"][2] >= 2
    known, new, other = row["tags"][1]
    assert (known, [new]) == (before["tags"][0][1], row["tags"][2])
    assert len({new, other}) == 2
    assert min(new, other) >= 3
    assert row["kind"][1] >= 1
    assert manifest(Path("later")).features == manifest(Path("data")).features
    for name in ("brand", "kind"):
        file = f"vocabulary-{name}.parquet"
        assert Path("later", file).read_bytes() == Path("data", file).read_bytes()
    assert "feature 'tags' has 3 values outside its vocabulary" in capsys.readouterr().err


def test_a_feature_that_the_earlier_data_set_lacks_is_numbered_with_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    imported()
    result = imported("--features", "brand", "--vocabulary", "data", target="later")
    assert chosen(result, "brand")[0] == (["x"],)
    assert "data has no vocabulary of feature 'brand': its values are numbered anew" in capsys.readouterr().err


def test_importing_twice_gives_the_same_bytes_with_any_memory() -> None:
    rng = np.random.default_rng(0)
    size = 20_000
    frame = pl.DataFrame(
        {
            "user": rng.integers(0, 300, size),
            "item": rng.integers(0, 500, size),
            "time": rng.integers(0, 4000, size),
            "brand": rng.integers(0, 40, size).astype(str),
            "tags": [list(map(str, rng.integers(0, 9, n))) for n in rng.integers(0, 4, size)],
        }
    )
    frame.write_parquet("log.parquet")
    pl.DataFrame({"item": range(500), "kind": [f"k{i % 7}" for i in range(500)]}).write_csv("items.csv")
    words = ["--features", "brand:id", "tags:set", "--items", "items.csv", "--item-features", "kind"]
    for target, memory in (("a", "1024"), ("b", "1024"), ("c", "1")):
        assert import_events("log.parquet", *words, "--memory-mb", memory, target=Path(target)) == 0
    contents = [{path.name: path.read_bytes() for path in Path(target).iterdir()} for target in ("a", "b", "c")]
    assert contents[0] == contents[1] == contents[2]
    assert sum(len(row["tags"]) for row in named_rows(Path("a"))) == size


def test_numbers_pass_to_the_loader() -> None:
    Path("log.csv").write_text("user,item,time,price,brand\nu,a,1,2.5,x\nu,b,2,1,y\n")
    imported("--features", "price", "brand")
    (batch,) = loader("data", columns=("price", "brand"))
    assert batch.history["price"].tolist() == [2.5, 1]
    assert batch.history["brand"].tolist() == [0, 1]


def test_copied_histories_state_which_columns_are_ids(capsys: pytest.CaptureFixture[str]) -> None:
    Path("plain").mkdir()
    table = {"user_id": [1, 2], "item_id": [[5], [3]], "timestamp": [[1], [1]], "brand": [[4], [9]], "price": [0.5, 1]}
    pq.write_table(pa.table(table), "plain/a.parquet")
    words = ["data", "import", "histories", "plain"]
    assert main([*words, "data", "--features", "brand:id", "price"]) == 0
    assert manifest(Path("data")).features == {"brand": 10}
    assert main([*words, "other", "--features", "price:id"]) == 3
    assert "feature 'price' cannot be an id: column 'price' holds float64" in capsys.readouterr().err


def refused(code: int, *words: str, source: str = "log.csv") -> None:
    assert import_events(source, *words, target=Path("data")) == code
    assert not Path("data").exists()


@pytest.mark.parametrize(
    ("words", "what", "remedy"),
    [
        (("--features", "prise"), "no column 'prise' for feature 'prise'", "did you mean 'price'?"),
        (("--features", "price:nubmer"), "(a kind is one of id, set, number, bits)", "valid: action"),
        (("--features", "brand:number"), "feature 'brand' cannot be a number: column 'brand' holds text", "brand:id"),
        (("--features", "brand:bits"), "feature 'brand' cannot be bits: column 'brand' holds text", "brand:id"),
        (("--features", "brand", "brand:id"), "2 features are called 'brand'", "name each column once"),
        ((*TABLES[:3], "colour"), "no column 'colour' for feature 'colour'", "valid: genres, item, kind, size"),
        ((*TABLES, "--features", "brand", "--item", "brand"), "no column 'brand' for the keys of the items", "valid:"),
        (("--event-labels", "star"), "no column 'star' for label 'star'", "valid:"),
        (("--event-labels", "brand"), "label_brand missing or not of its type: a label is a number", "fix that line"),
    ],
)
def test_features_that_the_log_cannot_give_are_refused_with_a_remedy(
    words: tuple[str, ...], what: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(3, *words)
    output = capsys.readouterr().err
    assert what in output
    assert f"remedy: {remedy}" in output or remedy in output.split("remedy:")[1]
    assert "where:" in output


@pytest.mark.parametrize(
    ("column", "kind", "what"),
    [
        (pa.array([0.5]), "id", "cannot be an id: column 'x' has type Float64"),
        (pa.array([0.5]), "bits", "cannot be bits: column 'x' has type Float64"),
        (pa.array([0.5]), "set", "cannot be a set: column 'x' has type Float64"),
        (pa.array([[0.5]]), "set", "cannot be a set: column 'x' has type List(Float64)"),
        (pa.array([[1]]), "number", "cannot be a number: column 'x' has type List(Int64)"),
        (pa.array([True]), "bits", "cannot be bits: column 'x' has type Boolean"),
    ],
)
def test_a_kind_that_a_column_cannot_have_is_refused(
    column: pa.Array, kind: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"user": [1], "item": [1], "time": [1], "x": column}), "log.parquet")
    refused(3, "--features", f"x:{kind}", source="log.parquet")
    assert f"feature 'x' {what}" in capsys.readouterr().err


def test_a_value_that_does_not_convert_is_rejected_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("log.csv").write_text(LOG.replace("u,b,2,20,", "u,b,2,cheap,"))
    refused(3, "--features", "price")
    output = capsys.readouterr().err
    assert "price missing or not of its type: feature 'price' is a number; price:id numbers any text" in output
    assert "log.csv, line 4" in output
    assert chosen(imported("--features", "price", "--on-bad", "skip"), "price") == [([5],), ([None, 30.5],)]


def test_a_line_of_a_side_table_that_does_not_convert_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    Path("items.csv").write_text(ITEMS.replace("b,,2,", "b,,big,") + ",x,1,\n")
    refused(3, *TABLES)
    assert "items.csv, line 3" in capsys.readouterr().err
    result = imported(*TABLES, "--on-bad", "skip")
    assert chosen(result, "size") == [([3],), ([3, None, None],)]
    assert "2 rows skipped" in capsys.readouterr().err


def test_a_key_that_occurs_twice_in_a_side_table_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("items.csv").write_text(ITEMS + "a,pen,1,\n")
    refused(3, *TABLES)
    output = capsys.readouterr().err
    assert "column 'item' holds 'a' more than once, so its features 'kind', 'size', 'genres' are not clear" in output
    assert "keep one line per key" in output
    assert "items.csv" in output


def test_a_separator_that_never_occurs_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    imported("--features", "tags:set", "--set-separator", ";")
    warning = "feature 'tags': the separator ';' occurs in none of the first 4 values of column 'tags'"
    assert warning in capsys.readouterr().err


def test_a_column_whose_name_no_file_can_have_gets_no_vocabulary(capsys: pytest.CaptureFixture[str]) -> None:
    Path("log.csv").write_text("user,item,time,../x,a/b\nu,a,1,y,1\n")
    refused(3, "--features", "../x:id")
    assert "the name of column '../x' cannot be in a file name" in capsys.readouterr().err
    assert chosen(imported("--features", "a/b"), "a/b") == [([1],)]


@pytest.mark.parametrize("name", ["key", "count", "number", "begin", "end", "seen", "bucket", "element"])
def test_a_feature_may_have_any_name_that_is_not_reserved(name: str) -> None:
    for file in ("log.csv", "items.csv", "users.csv"):
        Path(file).write_text(f"user,item,time,{name}\nu,a,1,x\n")
    Path("shown.csv").write_text("user,item,time,click\nu,a,2,1\n")
    shown = ["--impressions", "shown.csv", "--labels", "click"]
    tables = [["--items", "items.csv", "--item-features"], ["--users", "users.csv", "--user-features"], ["--features"]]
    for number, words in enumerate(tables):
        (row,) = imported(*words, f"{name}:id", *shown, target=str(number))
        assert row[name] in (["x"], "x")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--items", "items.csv"), "a table of items needs both its files and its features"),
        (("--user-features", "age"), "a table of users needs both its files and its features"),
        (("--set-separator", "", "--features", "tags:set"), "--set-separator is empty"),
        (
            ("--event-labels", "price", "--impressions", "log.csv", "--labels", "price"),
            "with impressions, labels belong to the candidates",
        ),
    ],
)
def test_incomplete_options_are_refused(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(2, *words)
    assert message in capsys.readouterr().err


def test_a_named_format_refuses_options_that_it_would_ignore(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "import", "ml-1m", "log.csv", "data", "--features", "price"]) == 2
    assert "the format ml-1m has its own columns: --features belongs to events, histories" in capsys.readouterr().err


def test_a_damaged_vocabulary_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    imported("--features", "brand")
    pl.DataFrame({"key": ["x", "x"], "count": [1, 1]}).write_parquet("data/vocabulary-brand.parquet")
    assert import_events("log.csv", "--features", "brand", "--vocabulary", "data", target=Path("later")) == 3
    assert "the vocabulary is damaged" in capsys.readouterr().err
