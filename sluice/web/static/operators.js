// The policy page: a file of the viewer's computer into the text field. Without this script the text is pasted.
"use strict";
for (const input of document.querySelectorAll("input[type=file][data-into]")) {
  input.closest("label").hidden = false;
  input.addEventListener("change", async () => {
    if (input.files.length) document.getElementById(input.dataset.into).value = await input.files[0].text();
  });
}
