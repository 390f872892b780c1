"""The checker of records: it knows what the schema uses, and refuses what it does not know."""

import pytest

from hamu.unlearning.record.schema import schema, violations


@pytest.mark.parametrize(
    ("part", "good", "bad"),
    [
        ({"type": "integer"}, [3, -1], [3.5, True, "3", None]),
        ({"type": "number"}, [3, 0.5], [True, "3"]),
        ({"type": ["string", "null"]}, ["", None], [0, []]),
        ({"type": "boolean"}, [True], [1, 0]),
        ({"enum": ["a", 1]}, ["a", 1], ["b", 2]),
        ({"type": "string", "pattern": "^[0-9]{2}$"}, ["12"], ["123", "a1"]),
        ({"type": "integer", "minimum": 2}, [2, 3], [1]),
        ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [[1, "2"], {}]),
        ({"required": ["a"]}, [{"a": None}], [{}, {"b": 1}]),
        ({"properties": {"a": {"type": "null"}}}, [{"a": None}, {"b": 1}], [{"a": 1}]),
        (
            {"properties": {"a": {}}, "additionalProperties": False},
            [{"a": 1}, {}],
            [{"a": 1, "b": 1}],
        ),
        ({"type": "object", "additionalProperties": {"type": "string"}}, [{"a": "b"}], [{"a": 1}]),
        ({"type": "object", "$ref": "#/$defs/d"}, [{"a": 1}], [{}, None]),
    ],
)
def test_each_keyword_means_what_json_schema_says(part, good, bad):
    whole = part | {"$defs": {"d": {"type": ["object", "null"], "required": ["a"]}}}
    for value in good:
        assert not list(violations(value, whole)), value
    for value in bad:
        assert list(violations(value, whole)), value


def test_the_schema_describes_every_object_to_its_end():
    """No object may hold what nobody has described, but the settings and what is listed by name."""
    open_ones = []

    def look(part, at):
        if "properties" in part and part.get("additionalProperties") is not False:
            open_ones.append(at)
        for name, inner in {**part.get("properties", {}), **part.get("$defs", {})}.items():
            look(inner, f"{at}.{name}")

    look(schema(), "record")
    assert open_ones == []
