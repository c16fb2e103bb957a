"""New text for a line of a script."""

import pytest

from trimtab.checks._script import under_no_grad, with_arguments


@pytest.mark.parametrize(
    ("text", "new"),
    [
        ("loader = DataLoader(data)", "loader = DataLoader(data, num_workers=2)"),
        (
            "    loader = torch.utils.data.DataLoader(data, 8,)  # é",
            "    loader = torch.utils.data.DataLoader(data, 8, num_workers=2)  # é",
        ),
        ("x = DataLoader(größe, num_workers=0, shuffle=True)", "x = DataLoader(größe, num_workers=2, shuffle=True)"),
        ("for x, y in DataLoader(data):", "for x, y in DataLoader(data, num_workers=2):"),
        ("x = DataLoader()", "x = DataLoader(num_workers=2)"),
        ("loader = DataLoader(", None),
        ("x = DataLoader(data, **options)", None),
        ("x, y = DataLoader(a), DataLoader(b)", None),
        ("loader = make(data)", None),
    ],
)
def test_a_keyword_is_set_where_the_line_is_a_whole_statement(text: str, new: str | None) -> None:
    assert with_arguments(text, "DataLoader", {"num_workers": "2"}) == new


def test_the_first_argument_is_set_where_it_is_the_only_one() -> None:
    assert with_arguments("torch.set_num_threads(16)", "set_num_threads", {"": "2"}) == "torch.set_num_threads(2)"
    assert with_arguments("set_num_threads(*a)", "set_num_threads", {"": "2"}) is None
    assert with_arguments("set_num_threads()", "set_num_threads", {"": "2"}) is None


def test_a_simple_statement_is_put_under_no_grad() -> None:
    assert under_no_grad("\tout = model(x)") == "\twith torch.no_grad():\n\t    out = model(x)"
    assert under_no_grad("return model(x)") is None
    assert under_no_grad("for x in data:") is None
    assert under_no_grad("out = model(") is None
