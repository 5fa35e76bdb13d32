"""``zoo generate``."""

from pathlib import Path
from typing import Annotated

import typer

from zoo.cli.options import Device, Dtype
from zoo.cli.options import dtype as read_dtype


def generate(
    folder: Annotated[Path, typer.Argument(help="A model that zoo.save wrote.")],
    prompt: Annotated[
        str | None,
        typer.Option(help="Text to go on from. Token ids, e.g. 1,2,3, if the vocabulary is not the 256 bytes."),
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file that holds it.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens to add.")] = 128,
    temperature: Annotated[float, typer.Option(help="Below 1 likely tokens gain; 0 takes the likeliest always.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many of the likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the fewest likely tokens that have this probability together.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the drawing. Default: another each time.")] = None,
    stop: Annotated[
        int | None, typer.Option(help="Id of a token to stop at, e.g. 10, the byte that ends a line.")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Compile the step. Default: on CUDA.")
    ] = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Import the classes that the folder's configuration names by a path.")
    ] = False,
) -> None:
    """Go on from a prompt with a saved model, and print each token when it is there.

    The speed stands on stderr: of everything, the prompt's pass and the compilation too.
    """
    import torch

    from zoo import machine
    from zoo.checkpoint import load
    from zoo.prompt import read, stream

    where, chosen, text = machine.find(device), read_dtype(dtype), read(prompt, prompt_file)
    model = load(folder, device=where, trust_code=trust_code)
    model.to(chosen or (torch.bfloat16 if where.type == "cuda" else torch.float32))
    drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    stream(model, text, max_new_tokens, stop_token=stop, compile=compile, **drawing)
