"use strict";

// Put the players in the places that the page has for them, and take away what stands there without scripts.
for (const [id, run, View, name] of [
  ["pool-player", POOL_RUN, PoolView, "A pool of blocks, step by step"],
  ["v1-player", V1_RUN, ThreadBlockView, "A thread block of v1, step by step"],
]) {
  const place = document.getElementById(id);
  new StepPlayer(place, run, new View(run, id), name);
  for (const still of document.querySelectorAll(`.still-of-${id}`)) still.hidden = true;
}
new FreePlay(document.getElementById("pool-play"));
