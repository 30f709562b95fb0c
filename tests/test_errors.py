"""The one exception that reaches a user as a sentence."""

from eagle_train.errors import UserError, nearest


def test_user_error_is_one_line_and_nearest_names_help():
    assert str(UserError("a\n  b")) == "a b"
    assert nearest("optm", ["optim", "loss"]) == "; did you mean 'optim'?"
    assert nearest("zzz", ["optim"]) == ""
