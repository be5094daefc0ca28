"""The entry point of a recipe that keeps state, from outside the project."""

from ottava import RecipeSpec, hookimpl


@hookimpl
def ottava_recipes() -> list[RecipeSpec]:
    return [
        RecipeSpec(
            name="acme-average",
            summary="Per-tensor FP8, the scale from a moving average of amaxes",
            factory="acme_average_recipe:MovingAverage",
            stateful=True,
            needs_reduction=True,
            formats=("E4M3", "E5M2"),
        )
    ]
