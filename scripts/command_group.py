"""Groups of subcommands whose modules are imported only when they are named."""

from __future__ import annotations

import difflib

import click


class HintingGroup(click.Group):
    """Answers an unknown name with the right one, and no name with the help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click, but the help of a lone name is no error that quotes it."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(click.UsageError.exit_code)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click, but with a hint."""
        known = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in known:
            close = difflib.get_close_matches(args[0], known, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"they are {', '.join(known)}"
            ctx.fail(f"there is no command `{args[0]}`; {hint}")
        return super().resolve_command(ctx, args)
