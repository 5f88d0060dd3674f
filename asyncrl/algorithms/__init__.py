"""The algorithms: each a page of plain asyncio over the services of a fleet."""
