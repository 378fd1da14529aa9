"""The Lightning strategy; importing it registers the name `"context_parallel"`."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_cp.plugin.strategy import ContextParallelStrategy

__all__ = ["ContextParallelStrategy"]

if ContextParallelStrategy.strategy_name not in StrategyRegistry.available_strategies():
    ContextParallelStrategy.register_strategies(StrategyRegistry)
