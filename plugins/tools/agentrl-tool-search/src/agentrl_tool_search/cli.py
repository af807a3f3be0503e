"""``agentrl search-index``."""

from pathlib import Path
from typing import Annotated

import typer

from agentrl_core.api import DataError

app = typer.Typer(add_completion=False)


@app.command()
def search_index(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="CORPUS... INDEX", help="Files (.jsonl, .parquet), and the new directory of the index."),
    ],
    column: Annotated[
        str | None, typer.Option(help="Column of the text; default: contents, text, content or passage.")
    ] = None,
    stopwords: Annotated[str, typer.Option(help="Language of the words to leave out; empty: none.")] = "en",
) -> None:
    """Build an index for the tool `search` from a corpus with one document in each row."""
    from agentrl_tool_search.index import build_index

    *files, folder = paths
    if not files:
        raise typer.BadParameter("give at least one file of the corpus, and then the directory of the index")
    try:
        count = build_index(files, folder, column, stopwords)
    except DataError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"Indexed {count:,} documents in {folder}")
