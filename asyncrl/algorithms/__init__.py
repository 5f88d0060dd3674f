"""The algorithms: each an algorithm of plain asyncio over the services of a fleet."""
