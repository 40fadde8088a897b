"""The one error that a user can cause and mend."""


class UserError(ValueError):
    """Bad input: one line that says what was expected and what came.

    Scripts print it without a traceback and exit with code 2 (see `draftlab.cli.main`).
    """
