"use strict";

const rate = document.getElementById("hit-rate");

async function refresh() {
  try {
    const history = await (await fetch("history.json", { signal: AbortSignal.timeout(10000) })).json();
    const last = history.seconds.at(-1);
    const at = (name) => last[history.fields.indexOf(name)];
    const asked = last ? at("asked_tokens") : 0;
    rate.textContent = asked ? `${((100 * (at("l1_tokens") + at("l2_tokens"))) / asked).toFixed(1)} %` : "no lookups yet";
  } catch (error) {
    rate.textContent = `no answer: ${error.message}`;
  }
  setTimeout(refresh, 1000);
}

refresh();
