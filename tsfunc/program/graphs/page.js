"use strict";
// Pan and zoom of a graph change its viewBox; search, hover and branches use the nodes' data.
const facts = JSON.parse(document.getElementById("facts").textContent);
const hint = document.getElementById("hint");

for (const box of document.querySelectorAll(".graph")) {
  const svg = box.querySelector("svg");
  const view = svg.viewBox.baseVal;
  const whole = [view.x, view.y, view.width, view.height];
  const set = (x, y, w, h) => svg.setAttribute("viewBox", [x, y, w, h].join(" "));
  const scale = () => Math.max(view.width / box.clientWidth, view.height / box.clientHeight) || 1;
  box.addEventListener("wheel", (event) => {
    event.preventDefault();
    const by = event.deltaY > 0 ? 1.15 : 1 / 1.15;
    const at = svg.getBoundingClientRect();
    const x = (event.clientX - at.left) / (at.width || 1);
    const y = (event.clientY - at.top) / (at.height || 1);
    set(view.x + view.width * (1 - by) * x, view.y + view.height * (1 - by) * y,
      view.width * by, view.height * by);
  }, { passive: false });
  let from = null;
  let dragged = false;
  box.addEventListener("pointerdown", (event) => {
    from = [event.clientX, event.clientY, view.x, view.y];
    dragged = false;
  });
  window.addEventListener("pointerup", () => { from = null; });
  window.addEventListener("pointermove", (event) => {
    if (from) {
      dragged ||= Math.hypot(event.clientX - from[0], event.clientY - from[1]) > 3;
      set(from[2] - (event.clientX - from[0]) * scale(),
        from[3] - (event.clientY - from[1]) * scale(), view.width, view.height);
    }
  });
  // A drag that ends on a node is not a click on the node.
  box.addEventListener("click", (event) => { if (dragged) event.stopPropagation(); }, true);
  box.addEventListener("dblclick", () => set(...whole));
}

for (const node of document.querySelectorAll("g[data-node]")) {
  const known = facts[node.closest(".graph").dataset.graph][node.dataset.node] || {};
  const code = node.closest("section, details").querySelector("pre");
  const line = code && code.querySelector(`[data-line="${CSS.escape(node.dataset.node)}"]`);
  node.querySelector("title")?.remove(); // the hint says more than the browser's tooltip
  node.addEventListener("pointerenter", () => {
    hint.textContent = Object.entries(known).filter(([key]) => key !== "bodies")
      .map(([key, value]) => `${key}: ${value}`).join("\n");
    node.classList.add("hovered");
    line?.classList.add("at");
  });
  node.addEventListener("pointerleave", () => {
    hint.textContent = "";
    node.classList.remove("hovered");
    line?.classList.remove("at");
  });
  if (known.bodies) {
    node.classList.add("opens");
    node.addEventListener("click", () => {
      for (const id of known.bodies) {
        const body = document.getElementById(id);
        body.open = !body.open;
        if (body.open) body.scrollIntoView({ block: "nearest" });
      }
    });
  }
}

// Scroll to a node, and show all of its graph if it was moved out of the graph's box.
function reveal(node) {
  const box = node.closest(".graph");
  const [inner, outer] = [node.getBoundingClientRect(), box.getBoundingClientRect()];
  if (inner.left < outer.left || inner.right > outer.right
    || inner.top < outer.top || inner.bottom > outer.bottom) box.dispatchEvent(new Event("dblclick"));
  node.scrollIntoView({ block: "nearest" });
}

const search = document.getElementById("search");
const count = document.getElementById("count");
search.addEventListener("input", () => {
  const wanted = search.value.trim().toLowerCase();
  let found = 0;
  let first = null;
  const has = (text) => wanted !== "" && text.toLowerCase().includes(wanted);
  for (const node of document.querySelectorAll("g[data-node]")) {
    const known = facts[node.closest(".graph").dataset.graph][node.dataset.node] || {};
    const hit = has([node.dataset.node, node.textContent, ...Object.values(known)].join(" "));
    node.classList.toggle("found", hit);
    node.classList.toggle("faded", wanted !== "" && !hit);
    found += hit;
    if (hit) first ??= node;
    if (hit) for (let up = node.closest("details"); up; up = up.parentElement.closest("details")) up.open = true;
  }
  for (const row of document.querySelectorAll("tbody tr")) {
    const hit = wanted === "" || has(row.textContent);
    row.hidden = !hit;
    found += hit && wanted !== "";
  }
  if (first) reveal(first);
  count.textContent = wanted ? `${found} found` : "";
});

for (const head of document.querySelectorAll("th")) {
  head.addEventListener("click", () => {
    const body = head.closest("table").tBodies[0];
    const at = head.cellIndex;
    const down = head.dataset.down !== "yes";
    head.dataset.down = down ? "yes" : "no";
    const key = (row) => row.cells[at].textContent;
    const order = (a, b) => (key(a) - key(b)) || key(a).localeCompare(key(b));
    [...body.rows].sort((a, b) => (down ? order(b, a) : order(a, b))).forEach((row) => body.append(row));
  });
}
