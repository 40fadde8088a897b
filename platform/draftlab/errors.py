"""The one error that a user can cause and mend."""


class UserError(ValueError):
    """Bad input: one line that says what was expected and what came.

    Scripts print it without a traceback and exit with code 2 (see `draftlab.cli.main`).
    """


def first_line(error: Exception) -> str:
    """The first line of an error's text, and the next one where that only announces it; its kind if there is none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
