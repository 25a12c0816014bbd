
"use strict";
const form = document.getElementById("filter");
if (form) {
  const rows = Array.from(document.querySelectorAll("#requests-table tbody tr"));
  const fields = form.elements;
  const apply = () => {
    const text = fields.text.value.trim().toLowerCase();
    let shown = 0;
    for (const row of rows) {
      row.hidden = !(
        (!fields.series.value || row.dataset.series === fields.series.value) &&
        (!fields.grade.value || row.dataset.grade === fields.grade.value) &&
        row.textContent.toLowerCase().includes(text)
      );
      shown += !row.hidden;
    }
    form.querySelector("output span").textContent = shown;
  };
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
}
const unfold = [];
addEventListener("beforeprint", () => {
  for (const closed of document.querySelectorAll("details:not([open])")) {
    closed.open = true;
    unfold.push(closed);
  }
});
addEventListener("afterprint", () => {
  for (const opened of unfold.splice(0)) opened.open = false;
});
